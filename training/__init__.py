"""Everything around the algorithm in ``train_ppo.py`` that keeps a run alive.

``config`` knobs and command line · ``preflight`` checks and estimates before the start (``token_counts`` of random
games, ``memory``) · ``trajectories`` what a step is trained on, ``positions`` what its seats knew · ``state`` adaptive
state and its checkpoints · ``process`` lock, signals, logging · ``ranks`` several processes · ``metrics`` written,
``console`` shown, ``loggers`` sent · ``about`` the record of a run · ``alarms`` signs that training goes wrong.
"""
