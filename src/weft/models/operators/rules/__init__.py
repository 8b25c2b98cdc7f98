"""Rules that entries of the table name: costs, shapes of outputs, dependence of rows, meanings in torch."""
