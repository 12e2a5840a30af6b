"""Workers and servers of a Ray that is started here, as forks of one process that has loaded torch while Ray starts.

Loading torch takes 1.5 s of a core. As forks the members of a run have it at once: on two cores two workers begin 1.6 s
sooner, and two with a server 2 s, and they share the memory that it takes. Where the environment has
`PACELINE_FORKS=off`, each process loads it itself.

`launching.py` is the launcher's side, `server.py` the process that is forked, and `stand_in.py` what Ray's node manager
starts for each process, and takes for it.
"""
