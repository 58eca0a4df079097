// Package kube is all that crustd knows of Kubernetes: it reads the pods of this node and their RuntimeClasses, asks for
// single claims, and writes events to pods. It implements policy.Pods; nothing else in the daemon needs an API server.
//
// Its rights are few: list and watch pods (with a field selector on the node), get, list and watch RuntimeClasses, get
// PersistentVolumeClaims, create and patch events. What it cannot find out is unavailable; it never guesses.
package kube
