// Package convert turns disk images from one format into another with qemu-img, in a child that can do nothing else.
//
// QEMU's format drivers were made for images that one trusts. So the child sees two files, the image and what it becomes, and
// below /usr what it takes to run; it has its own, empty network, a user id that has no rights, no way to get any, and limits
// for memory, time and the size of what it writes. It is told the formats and never guesses. What it has made belongs to it
// only until it has ended.
//
// The child begins as this same program, because a namespace has to be furnished before qemu-img is in it: main functions,
// and tests, call [Main] first.
package convert
