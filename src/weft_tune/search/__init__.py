"""The phases of the search, a page each; ``tuning.tuner`` runs them one after another."""
