"""Code that methods share: FedAvg and local training, losses, heads, prototypes, clustering, training at the server."""
