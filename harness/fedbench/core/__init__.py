"""What all else is made of: specs, scenarios, federations, tasks, hooks, hyper-parameters. They import no others."""
