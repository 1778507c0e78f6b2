"""kvpool beside its peers: contests, simulations and plots, run from a checkout and in no wheel."""
