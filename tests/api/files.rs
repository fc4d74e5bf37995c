//! Files that are made from the types.

use std::fs;

use libtest_mimic::{Failed, Trial};
use paddock::api;

use crate::server::root;

pub fn tests() -> Vec<Trial> {
    let mut files: Vec<_> = api::crds_yaml().into_iter().map(|(name, text)| (format!("crds/{name}"), text)).collect();
    files.push(("docs/reference.md".into(), api::reference_markdown()));
    files
        .into_iter()
        .map(|(path, text)| Trial::test(format!("generated::{path}"), move || is_current(&path, &text)))
        .collect()
}

fn is_current(path: &str, text: &str) -> Result<(), Failed> {
    match fs::read_to_string(root().join(path)) {
        Ok(current) if current == text => Ok(()),
        Ok(_) => Err(format!("{path} is not what crates/core/src/api makes of it: run `make generate`").into()),
        Err(error) => Err(format!("{path}: {error}: run `make generate`").into()),
    }
}
