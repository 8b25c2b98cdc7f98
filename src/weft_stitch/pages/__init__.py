"""Tables, pictures and reports of stitched models."""
