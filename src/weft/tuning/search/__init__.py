"""The phases of the search, a page each."""
