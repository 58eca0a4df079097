package csiplugin

import (
	"context"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// publishDeferred records a deferred publish that [planPublish] has allowed, and answers with what has to be mounted in the
// sandbox. It touches nothing of the volume but the fragment of a format, so the record is intent and outcome at once.
//
// That the volume was never written is recorded too: as long as it is, and only then, what the sandbox leaves behind may
// be erased if it was never mounted.
func (n *node) publishDeferred(ctx context.Context, v catalog.Volume, state catalog.Node, want catalog.Publish, flags []string) (*deferred.DeferredFilesystem, error) {
	st, err := n.stat(ctx, v)
	if err != nil {
		return nil, err
	}
	old, repeat := state.Publishes[want.Target]
	if repeat = repeat && old.Same(want); repeat {
		// A reboot may have cut off what nobody can tell from data any more.
		want.Discard = old.Discard
		want.NeverWritten = old.NeverWritten && (old.Boot == want.Boot || st.NeverWritten)
	} else {
		if err := n.free(ctx, v, state); err != nil {
			return nil, err
		}
		if st, err = n.withoutFragment(ctx, v, &state, st); err != nil {
			return nil, err
		}
		want.NeverWritten = st.NeverWritten && !want.ReadOnly
	}
	if !repeat || old != want {
		if err := n.catalog.Reserve(); err != nil {
			return nil, err
		}
		if err := n.putPublish(v, &state, want); err != nil {
			return nil, err
		}
		crashpoint.At(ctx, "deferred publish recorded")
	}
	return &deferred.DeferredFilesystem{
		Device:       n.path(v),
		FsType:       want.Use.FSType,
		MountFlags:   mountFlags(want, flags),
		ReadOnly:     want.ReadOnly,
		FormatPolicy: formatPolicy(want),
		NeverWritten: st.NeverWritten,

		SupplementalGroup:             want.Group,
		SupplementalGroupChangePolicy: want.Policy,
		SizeBytes:                     st.Size,
	}, nil
}

// withoutFragment erases what an interrupted format on the host has left.
func (n *node) withoutFragment(ctx context.Context, v catalog.Volume, state *catalog.Node, st engine.Stat) (engine.Stat, error) {
	if !state.Formatting {
		return st, nil
	}
	if err := n.eraseFragment(ctx, v, state); err != nil {
		return st, err
	}
	state.Formatting = false
	return n.stat(ctx, v)
}

func formatPolicy(p catalog.Publish) deferred.FormatPolicy {
	if p.ReadOnly {
		return deferred.FormatPolicy_FORMAT_POLICY_NEVER
	}
	return deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK
}
