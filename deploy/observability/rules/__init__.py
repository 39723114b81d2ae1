"""Recording rules and alerts. Numbers that an operator chooses are placeholders (`slo`)."""
