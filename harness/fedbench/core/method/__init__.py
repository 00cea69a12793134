"""What a method is: hooks, what they are handed and must give, hyper-parameters."""
