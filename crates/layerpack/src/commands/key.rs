//! `layerpack key` and `layerpack sign`: keys, and layers that they vouch for.

use std::process::ExitCode;

use serde::Serialize;

use super::Outcome;
use crate::args::{KeyArgs, KeyCommand, SignArgs};
use crate::context::Context;
use crate::output::{note, print};
use crate::signing;
use crate::stack::parse_reference;

/// A key in `-o json`.
#[derive(Debug, Serialize)]
struct Shown {
    public: String,
}

pub(super) fn run(context: &Context, args: &KeyArgs) -> Outcome {
    let public = match &args.command {
        KeyCommand::Generate { file } => {
            let (public, beside) = signing::generate(file)?;
            if !context.quiet {
                note(&format!(
                    "the secret key is {}, the public one {}",
                    file.display(),
                    beside.display()
                ));
            }
            public
        }
        KeyCommand::Show { file } => signing::public(file)?,
    };
    let shown = Shown {
        public: public.to_string(),
    };
    print(context.format, &shown, |out| writeln!(out, "{public}"))?;
    Ok(ExitCode::SUCCESS)
}

/// A signed layer in `-o json`.
#[derive(Debug, Serialize)]
struct Signed {
    reference: String,
    digest: String,
    key: String,
    /// False when the key had signed it before.
    new: bool,
}

pub(super) fn sign(context: &Context, args: &SignArgs) -> Outcome {
    let key = signing::secret(&args.key)?;
    let store = context.store()?;
    let mut layers = Vec::with_capacity(args.refs.len());
    for text in &args.refs {
        layers.push(store.load(&parse_reference(text)?)?);
    }
    let mut signed = Vec::with_capacity(layers.len());
    for (digest, manifest) in layers {
        signed.push(Signed {
            reference: manifest.reference().to_string(),
            digest: digest.to_string(),
            key: key.public().to_string(),
            new: store.sign(&digest, &key)?,
        });
    }
    print(context.format, &signed, |out| {
        signed
            .iter()
            .try_for_each(|layer| writeln!(out, "{} {}", layer.reference, layer.digest))
    })?;
    Ok(ExitCode::SUCCESS)
}
