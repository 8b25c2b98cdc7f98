"""The command line: parses, calls, prints; nothing else. One module per command group."""
