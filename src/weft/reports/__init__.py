"""What a trace comes to: numbers, pictures, pages, and files for other tools."""
