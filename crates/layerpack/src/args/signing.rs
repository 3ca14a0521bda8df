//! Options of signatures: `key`, `sign`, and `--sign` of what publishes.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    pub(crate) command: KeyCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a key: FILE is the secret, readable by its owner only, FILE.pub the public key
    Generate {
        /// Where to; neither file may exist
        file: PathBuf,
    },
    /// Show the public key of a key file, secret or public
    Show {
        /// The key file
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct SignArgs {
    /// Layers to sign
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// File of the secret key
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
}

/// `--sign`, for commands that publish.
#[derive(Debug, Default, Clone, Args)]
pub(crate) struct SignWithArgs {
    /// Sign what is published with the secret key in FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) sign: Option<PathBuf>,
}
