"""Pictures that the model draws in training, and the rewards that rate them."""
