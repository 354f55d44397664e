"""Results of an evaluation: errors of documents, sets and speakers, and comparisons of models."""
