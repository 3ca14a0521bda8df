//! Registries: where their users' credentials are, as docker and the containers tools look for
//! them, and how images are fetched and sent.

use std::ffi::OsString;
use std::path::PathBuf;

use layerpack_store::registry::RegistryOptions;

/// Files with credentials, the first that knows a registry counts: `REGISTRY_AUTH_FILE`, else the
/// containers tools' `auth.json` and docker's `config.json`.
pub(crate) fn credential_files() -> Vec<PathBuf> {
    find(&|name| std::env::var_os(name))
}

fn find(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let dir = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(file) = dir("REGISTRY_AUTH_FILE") {
        return vec![file];
    }
    let docker = dir("DOCKER_CONFIG").or_else(|| dir("HOME").map(|home| home.join(".docker")));
    let run = dir("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json"));
    let lasting = dir("XDG_CONFIG_HOME")
        .or_else(|| dir("HOME").map(|home| home.join(".config")))
        .map(|dir| dir.join("containers/auth.json"));
    [docker.map(|dir| dir.join("config.json")), run, lasting]
        .into_iter()
        .flatten()
        .collect()
}

/// How images are fetched and sent.
pub(crate) fn image_options(plain_http: bool) -> RegistryOptions {
    RegistryOptions {
        credential_files: credential_files(),
        plain_http: plain_http.then_some(true),
        ..RegistryOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_where_other_tools_put_them() {
        let with = |set: &[(&str, &str)]| {
            let set: Vec<(String, OsString)> = set
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).into()))
                .collect();
            find(&move |name| {
                let found = set.iter().find(|(known, _)| known == name);
                found.map(|(_, value)| value.clone())
            })
        };
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(with(&[]), paths(&[]));
        assert_eq!(
            with(&[("HOME", "/h")]),
            paths(&["/h/.docker/config.json", "/h/.config/containers/auth.json"])
        );
        assert_eq!(
            with(&[
                ("HOME", "/h"),
                ("DOCKER_CONFIG", "/d"),
                ("XDG_RUNTIME_DIR", "/r")
            ]),
            paths(&[
                "/d/config.json",
                "/r/containers/auth.json",
                "/h/.config/containers/auth.json"
            ])
        );
        assert_eq!(
            with(&[
                ("HOME", "/h"),
                ("REGISTRY_AUTH_FILE", "/a"),
                ("DOCKER_CONFIG", "")
            ]),
            paths(&["/a"])
        );
    }
}
