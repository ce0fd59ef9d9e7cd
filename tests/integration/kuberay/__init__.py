"""KubeRay without Kubernetes: Ray's own `ray kuberay-autoscaler` (v2), an API server that holds a RayCluster, and raylets as its pods.

Real are Ray's head, its nodes, its drain and its autoscaler, and HTTPS between them. The tests' own are the part of Kubernetes' API that
the autoscaler asks for (api_server.py) and what KubeRay's operator and the kubelet do with pods (operator.py).
"""
