"""Rules that entries of the table name: costs, shapes of outputs, rows that depend on each other, meanings in torch."""
