"""All that decides what an example is, as texts by path: two of them can be compared, and the first difference is named.

What is compared of an object:

* its class, and its attributes, in ``__dict__`` and in slots;
* the members of containers. Plain values and tuples of them: all. Other objects in a container of more than 20,000: so many of
  them, spread over it;
* tensors, arrays, images and tables in memory: shape, type and content. Up to 256 MiB all of it, beyond that blocks that are
  spread over it. Of memory maps and of tables of Arrow some blocks;
* functions: defaults and enclosed variables;
* random generators: the class, and a seed that somebody has chosen. Not the state;
* open files, connections, locks, loggers, and objects of other libraries that do not consist of attributes: only the class. An
  object that is opened later (None before) is not a difference.

What is compared of code: the byte code and the constants of the methods and functions that reading can reach, and the values of
class attributes and module globals that this code names. Of installed packages only the version counts.

Nothing here raises, evaluates a property, calls a method of the user's, or reads from a file that is open. The texts are the same
in all processes, in two starts of one program, and under hash randomisation.
"""
