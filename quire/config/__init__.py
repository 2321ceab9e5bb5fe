"""Engine configuration: resolved once from the user's options and the model's files, then frozen.

Import the modules themselves (`quire.config.model`, ...). Nothing here may import torch, Triton or a web library.
"""
