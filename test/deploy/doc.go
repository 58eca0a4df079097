// Package deploy tests what is installed in a cluster, without one: the chart for several sets of values, every object in
// its Kubernetes type, the rights of each component, the images, and what the documents tell people to type.
package deploy
