"""From schemas, regexes, structural tags and grammars to the one language that grammars are compiled from."""
