"""The round loop: who trains, what is exchanged, evaluation, and the executors that train clients."""
