// Package routing is what the router and the crust-csi of a node have in common: certificates whose names say which of the two
// somebody is, and the mark by which the router knows a node's own answer from an error on the way there, and a node a call that
// means its pool from one that went astray.
//
// A node takes calls from who has a certificate for the name [RouterName], the router talks to who has one for [NodeName], and
// both only if one of the authorities that they were given has signed it. Nothing is said before that, and nothing in the clear.
package routing
