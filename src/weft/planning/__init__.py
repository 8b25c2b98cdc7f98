"""Plans: from models, rates and deadlines to a folder that is served, measured and checked."""
