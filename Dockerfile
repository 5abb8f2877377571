# Serve a trained network over HTTP. Arguments go to `multitudes serve`, for example /run/jobs/packed-0.
FROM python:3.12-slim
WORKDIR /multitudes
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[serve,huggingface]"
RUN useradd --create-home multitudes
USER multitudes
EXPOSE 8000
ENTRYPOINT ["multitudes", "serve", "--host", "0.0.0.0"]
