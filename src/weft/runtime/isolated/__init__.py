"""Models in worker processes: whatever a model does to its process, the server and other models go on.

``backend`` is what the server sees, ``group`` a worker with its spare and the models they have, ``process`` the
server's side of one worker. ``worker`` is the process itself, forked from the ``template`` that ``spawning`` keeps, and
``confinement`` what it gives up before it opens a model. What they say to each other is in ``packets`` and
``described``; large tensors lie in ``memory`` that both see. ``ear`` is who hears of the ends of steps. ``engine`` is
what a worker runs models with, and ``engines`` finds it by the name of a device; ``opening`` has the cores for the
server.
"""
