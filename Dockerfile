# syntax=docker/dockerfile:1
# For those who have Docker: docker build -t paddock . (`make image` needs none).
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/target \
    CARGO_TARGET_DIR=/target cargo build --release --locked --bin paddock && cp /target/release/paddock /paddock

# glibc, libgcc and CA certificates, and nothing else.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /paddock /usr/local/bin/paddock
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/paddock"]
