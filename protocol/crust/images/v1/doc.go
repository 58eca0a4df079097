// Package imagesv1 is how an operator's command on the node talks to crust-csi about backing images.
package imagesv1
