"""Plans: from models, rates and deadlines to a folder that is served, measured and checked.

``whole_run.make_plan`` is the road through: ``asked`` checks what is asked, ``measured`` measures the models on this
machine, ``candidates`` lists what could be done, ``bounds`` says what cannot win, ``trials`` simulates the rest,
``choice`` ranks them, ``reasons`` explains. ``plan`` is what comes out, ``folder`` writes and reads it.
"""
