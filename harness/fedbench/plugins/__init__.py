"""Methods as plugins: found, checked, assembled into one run, watched, and the code they are made of."""
