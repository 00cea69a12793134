"""How data are partitioned among clients, one module for each kind of skew."""
