"""`streamrl bench PROGRAM`: each module measures one part, beside what the same thing costs otherwise, in one run."""
