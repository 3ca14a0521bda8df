//! Options about fetching ahead, of everything that mounts a stack.

use anyhow::bail;
use clap::Args;
use layerpack_layerfs::{PrefetchMode, PrefetchSpec};
use layerpack_store::profile::Profile;
use layerpack_store::{LayerId, LayerStore};

use crate::context::Context;
use crate::output::warning;
use crate::stack::StackLayer;

/// What is fetched before it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PrefetchArg {
    /// Nothing.
    None,
    /// Metadata, which a mount always has.
    Meta,
    /// What the stack's access profile names, if there is one.
    Profile,
    /// That, then everything else, slowly.
    All,
}

impl PrefetchArg {
    /// As it is written on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Meta => "meta",
            Self::Profile => "profile",
            Self::All => "all",
        }
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PrefetchArgs {
    /// What to fetch before it is read
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = PrefetchArg::Profile)]
    pub(crate) prefetch: PrefetchArg,
    /// The access profile to go by, by name or digest [default: what the node has learnt of the
    /// stack, else the one that the store has for it]
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<String>,
}

impl PrefetchArgs {
    /// Fetch nothing ahead.
    pub(crate) fn none() -> Self {
        Self {
            prefetch: PrefetchArg::None,
            profile: None,
        }
    }

    /// For the daemon, to mount `layers`; a profile that is named is looked up, so that an error is
    /// the command's.
    ///
    /// # Errors
    /// When the profile is not in the store, or nothing is to be fetched by it.
    pub(crate) fn spec(
        &self,
        context: &Context,
        store: &LayerStore,
        layers: &[StackLayer],
    ) -> anyhow::Result<PrefetchSpec> {
        let mode = match self.prefetch {
            PrefetchArg::None => PrefetchMode::None,
            PrefetchArg::Meta => PrefetchMode::Meta,
            PrefetchArg::Profile => PrefetchMode::Profile,
            PrefetchArg::All => PrefetchMode::All,
        };
        let profile = match (&self.profile, mode) {
            (None, _) => None,
            (Some(_), PrefetchMode::None | PrefetchMode::Meta) => {
                bail!("--profile says what to fetch ahead: it goes with --prefetch profile or all")
            }
            (Some(name), _) => {
                let stack: Vec<LayerId> = layers.iter().map(|l| l.manifest.layer_id()).collect();
                let (digest, profile) = store.find_profile_of(name, &stack)?;
                if context.says_warnings() {
                    for text in misfits(store, name, &profile, layers) {
                        warning(&text);
                    }
                }
                Some(digest.to_string())
            }
        };
        Ok(PrefetchSpec { mode, profile })
    }
}

/// What a profile does not have in common with a stack.
fn misfits(
    store: &LayerStore,
    name: &str,
    profile: &Profile,
    layers: &[StackLayer],
) -> Vec<String> {
    let strange = profile.layers.iter().filter(|of| {
        let here = |l: &&StackLayer| l.manifest.layer_id() == of.layer;
        !layers.iter().any(|l| here(&l))
    });
    strange
        .map(|of| {
            let layer = store
                .manifest(&of.manifest)
                .map_or_else(|_| of.layer.to_string(), |m| m.reference().to_string());
            format!(
                "profile {name} speaks of {layer} as it is not in this stack: that part of it is ignored"
            )
        })
        .collect()
}
