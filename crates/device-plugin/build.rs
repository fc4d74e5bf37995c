//! Generates the kubelet's gRPC API from its proto file, without `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/deviceplugin.proto");
    let descriptors = protox::compile(["deviceplugin.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
