"""`python -m deploy.docs`: writes all generated pages below docs/."""

from deploy.docs import write
from deploy.docs.pages import pages

write(pages(), folder="docs")
