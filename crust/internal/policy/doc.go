// Package policy decides which volumes are deferred, and to which kind of runtime.
//
// In this order, the first answer wins: the volume's own parameter crust.dev/defer; the pod's annotation of the same
// name; the handler of the pod's RuntimeClass, if the configuration knows it. Without a pod reader only the first is
// asked. A deferral that was asked for and cannot be honoured is an error that names the cure; it is never decided away.
package policy
