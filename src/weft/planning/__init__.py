"""Plans: from models, rates and deadlines to a folder that is served, measured and checked.

``whole_run.make_plan`` is the road through: ``asked`` checks what is asked, ``measured`` measures the models on this
machine, ``candidates`` lists what could be done, ``bounds`` says what cannot win, ``trials`` simulates the rest,
``choice`` ranks them, ``reasons`` explains. ``plan`` is what comes out, ``folder`` writes and reads it.

Its modules: ``whole_run.py`` is the road through: ``target.py`` (the cores, a GPU or what was measured), ``asked.py``
(what is asked, checked), ``measured.py`` (hosts by lanes and threads, kept on disk), ``candidates.py`` (what could be
done), ``bounds.py`` (what cannot win), ``trials.py`` (short simulated runs), ``choice.py`` (criterion by criterion),
``finals.py`` (the nearest few again, with fresh requests), ``deciding.py`` (which of these is taken: differences within
the error of the runs do not count), ``segment_length.py`` (the best of them in longer segments), ``helpers.py``
(processes that simulate beside this one), ``early_exits.py`` (who leaves where), ``reasons.py``, ``busiest.py`` and
``page.py`` (what is told of it); ``plan.py`` is the value, ``folder.py`` writes and reads it, ``drift.py`` compares it
with what is here, ``timed_now.py`` with what its models take now, ``beside.py`` with what was measured.
"""
