"""What keeps a run alive around the algorithm in ``train_ppo.py``.

``config`` knobs and command line · ``preflight`` what a run would take, before it starts (``token_counts`` of random
games, ``memory``) · ``trajectories`` what a step is trained on, ``positions`` what its seats knew · ``state`` what is
adaptive, in and out of checkpoints · ``process`` lock, signals, log lines · ``ranks`` several processes, and how
statistics add up · ``metrics``, ``console``, ``loggers`` what is written, shown, sent · ``about`` what a run is, for
later · ``alarms`` signs that a run goes wrong.
"""
