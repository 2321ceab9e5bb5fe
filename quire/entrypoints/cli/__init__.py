"""The `quire` command: `main` reads the arguments, one module a subcommand does the work.

Nothing here imports torch before a model is wanted, so that `--help` answers at once.
"""
