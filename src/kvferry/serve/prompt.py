"""The demo's default prompt: a few hundred tokens, so that there is something to hand over."""

DEFAULT_PROMPT = """\
Here is a short history of a ferry line.

The first boat crossed the strait in spring, with eleven passengers, two bicycles and a crate of oranges. The captain \
kept a paper list of who had boarded and where their luggage stood, because the harbour on the other side was run by \
people she had never met. When the boat arrived, a clerk read the list aloud, and every passenger took exactly what \
was theirs. Nobody had to repack a suitcase, and nobody went home with another family's oranges.

In the second year there were four boats and six harbours. The harbours had been built by different towns: some had \
long piers, some had short ones, some stored luggage by owner and some by size. The captains soon noticed that most \
delays did not come from the sea. They came from lists that were copied by hand, from crates that were counted twice, \
and from clerks who said "all done" before the last crate had been carried ashore. So the line made a rule: a crossing \
is finished only when both harbours have counted the same crates, and a place on the pier is given to the next boat \
only when nobody can still put a crate on it.

The rule was unpopular for a week. Then a boat lost its engine half way, drifted for an hour and came in late, and for \
the first time nothing was lost, nothing was mixed up, and the clerk could say at once what had happened and where. \
After that, every captain wanted the rule, and the line grew to forty boats.

Explain in two or three sentences what made the ferry line reliable."""
