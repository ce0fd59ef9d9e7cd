"""`python -m deploy.manifests`: writes the committed files of deploy/kubernetes/."""

from deploy.docs import write
from deploy.manifests.files import files

write(files(), folder="deploy/kubernetes")
