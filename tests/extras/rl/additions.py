"""What rewards and preferences add to tables of tests/; see tests/tools/additions.py."""

RATED = dict(objective="flow_grpo", reward="no_package:rate")
REFUSED = [("Packages and names", "no_package, which is not", RATED)]  # topic, sentence, parameters
