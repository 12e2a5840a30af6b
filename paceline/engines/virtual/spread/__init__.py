"""Workers' computing in several local processes, the simulation in one.

A *crew* is a local process with some of the workers. For each of them the simulation has a *deputy*: it does there what
the worker asks for, at the worker's virtual time, with the same collective and store that a worker has that is computed
by the simulation itself. What comes of a run that ends well is the same, bit for bit, if torch computes with as many
threads.

While a worker computes, the simulation goes on as far as nothing that the worker may yet do can matter (conservative
synchronisation: Chandy and Misra, "Distributed Simulation", IEEE Transactions on Software Engineering 5(5), 1979). A
worker says as it asks for its next batch until when it will exchange nothing (`Promise`), and is left there: so the
simulation hears the same of others before any of them computes, and then has all crews compute at the same time.
"""
