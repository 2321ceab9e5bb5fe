"""The load generator behind `quire bench serve`: the client, the workload, the figures and the plot."""
