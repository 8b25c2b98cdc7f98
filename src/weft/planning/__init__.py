"""Plans: from models, rates and deadlines to a folder that is served, measured and checked.

``planning_run.make_plan`` runs all steps: ``plan_request`` checks what was asked for, ``measured`` measures the models
on this machine (hosts by lanes and threads, kept on disk), ``candidates`` lists the options, ``bounds`` drops those
that cannot win, ``trials`` simulates the rest in short runs, ``choice`` ranks them criterion by criterion, ``finals``
runs the best again with fresh requests, ``deciding`` takes one (differences within the error of the runs do not count),
``segment_length`` tries longer segments, ``early_exits`` chooses thresholds, ``reasons`` and ``busiest`` explain the
choice. ``process_pool`` has the processes that simulate in parallel. ``plan`` is the resulting value, ``folder`` writes
and reads it, ``page`` shows it; ``plan_check`` compares it with the present machine and files and times its
models again, ``prediction`` predicts other loads and compares with a bench run.
"""
