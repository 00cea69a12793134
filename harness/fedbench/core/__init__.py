"""The foundations of everything else: specs, scenarios, federations, tasks, hooks, hyper-parameters. They import no
other room."""
