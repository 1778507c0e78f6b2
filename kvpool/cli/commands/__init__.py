"""The options of each command. A command imports what it runs when it is called: ``kvpool --help`` stays fast."""
