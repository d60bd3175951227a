"""Train the autoencoder of a model, or its decoder alone."""
