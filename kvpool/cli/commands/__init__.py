"""The options of each command. Commands import their work when called: ``kvpool --help`` stays fast."""
