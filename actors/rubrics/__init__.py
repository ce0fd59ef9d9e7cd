"""What language models are asked when they judge: the rubric's file, the question, and the answer."""
